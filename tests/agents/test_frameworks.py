"""Frameworks of others, which know nothing of April: their loops and tools, on the gateway as on any endpoint.

Each is imported by its test, since importing them takes seconds, also where the test is not run."""

import asyncio

import openai
import pytest

from tests.support.agent_gateway import CALLS, MARKED

pytestmark = pytest.mark.full


def times(of: str) -> str:
    """Multiplies two numbers.

    Args:
        of: such as 5*3
    """
    first, second = map(int, of.split("*"))
    return str(first * second)


@pytest.mark.parametrize("api", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("streamed", [False, True])
def test_openai_agents_calls_its_tools_in_one_fork(meet, api, streamed):
    import agents
    from agents import Agent, RunConfig, Runner, function_tool

    client, policy, session, _ = meet("CALL5*3END$", "1+CALL2*3END$", "21$", template=MARKED, response_template=CALLS)

    async def play():
        own = openai.AsyncOpenAI(base_url=str(client.base_url), api_key=client.api_key, max_retries=0, timeout=60)
        agent = Agent(
            name="a", instructions="S", tools=[function_tool(times)], model=getattr(agents, api)("policy", own)
        )
        config = RunConfig(tracing_disabled=True)
        if not streamed:
            return (await Runner.run(agent, "12*3=", run_config=config)).final_output
        result = Runner.run_streamed(agent, "12*3=", run_config=config)
        async for _ in result.stream_events():
            pass
        return result.final_output

    assert asyncio.run(play()) == "21"
    assert [text for _, text, _ in policy.requests] == ["S12*3=:", "15:", "6:"]
    assert policy.forks == [(0, 0)] * 3 and session.superseded_forks() == []


@pytest.mark.parametrize("streaming", [False, True])
def test_a_graph_of_langgraph_calls_its_tools_in_one_fork(meet, streaming):
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    client, policy, session, _ = meet("CALL5*3END$", "1+CALL2*3END$", "21$", template=MARKED, response_template=CALLS)
    model = ChatOpenAI(
        model="policy", base_url=str(client.base_url), api_key=client.api_key, max_retries=0, streaming=streaming
    )
    tools, graph = [tool(times)], StateGraph(MessagesState)
    bound = model.bind_tools(tools)
    graph.add_node("policy", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "policy")
    graph.add_conditional_edges("policy", tools_condition, ["tools", END])
    graph.add_edge("tools", "policy")
    said = graph.compile().invoke({"messages": [("system", "S"), ("user", "12*3=")]})["messages"]
    assert said[-1].content == "21"
    assert [text for _, text, _ in policy.requests] == ["S12*3=:", "15:", "6:"]
    assert policy.forks == [(0, 0)] * 3 and session.superseded_forks() == []
